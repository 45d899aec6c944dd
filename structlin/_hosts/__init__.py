"""What models of other libraries need: one file for each library, registered in `registry`."""
