"""The trainer side: real Megatron-Core with our modules where the case says R, and its own where it says P.

`config` is light (standard library only); `trainer` loads torch and Megatron-Core and belongs in a rank process.
"""
