"""An endpoint with OpenAI's and Anthropic's interfaces; calls become prefix trees of tokens as they were sampled."""
