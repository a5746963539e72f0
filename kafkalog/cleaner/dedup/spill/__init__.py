"""Keys beyond the memory budget: written to temporary files, split, and resolved part by part."""
