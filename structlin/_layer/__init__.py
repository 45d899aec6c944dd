"""A structure with parameters as a layer, in floating point and in int8."""
