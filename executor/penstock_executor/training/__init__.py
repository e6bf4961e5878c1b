"""The part of the executor that needs PyTorch: elastic training behind `penstock_executor.start`."""
