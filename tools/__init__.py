"""What only this repository needs: its environment, its checks and its releases."""
