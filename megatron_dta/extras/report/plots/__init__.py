"""Charts and pictures by Matplotlib, for commands and for the page of a run. Importing a module takes a second."""
