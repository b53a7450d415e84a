"""What the API, the service and its users share. Pure: no I/O, Ray, torch, clock."""
