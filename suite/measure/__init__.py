"""How one cell is measured, inside a worker process. Only this room touches a device."""
