"""What a structure is: an einsum as integers, the families that make one for any widths, and the
checks of arguments that all rooms share."""
