"""The on-disk formats, one module each; `registry` lists them."""
