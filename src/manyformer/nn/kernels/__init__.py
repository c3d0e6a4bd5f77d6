"""The interface of attention kernels, and kernels that are made of others or of any score and weight function."""
