"""Experts divided over ranks: their plans, passes and exchange of rows."""
