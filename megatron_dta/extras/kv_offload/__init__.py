"""Keys and values of ancestors in host memory."""
