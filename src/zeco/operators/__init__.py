"""The mathematics of linear attention: an oracle and a chunkwise form for each operator."""
