"""Networks written for one rank of several: which part of each matrix a rank holds, and where ranks must meet."""
