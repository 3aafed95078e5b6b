"""The evaluation of GF-DiT (arXiv 2606.13501), figure by figure, from kept cells."""
