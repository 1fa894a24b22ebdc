"""Core attention of training segments and of decoding, with the K/V storage that it reads."""
