"""The operators alone: the delta rule token by token and over chunks, and the convolution."""
