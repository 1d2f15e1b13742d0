"""Matrix products: of 16-bit numbers, of low precision, of sparse weights."""
