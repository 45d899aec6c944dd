"""Linear layers of many packages under one protocol; a file in methods/ adds one."""
