"""The meeting point: API and controller each read here what the other wrote. Knows neither Ray nor torch."""
