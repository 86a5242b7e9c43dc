"""int4 weights: the array, its quantiser, its exchange layouts and its matrix product."""
