"""Linear recurrences over runs of tokens, with states that enter and leave: gated delta rule and short convolution."""
