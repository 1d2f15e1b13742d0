"""Results at rest: records, metrics, journals, where they lie and how they travel."""
