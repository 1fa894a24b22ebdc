"""Results of a row that do not depend on the other rows of a pass, bit for bit."""
