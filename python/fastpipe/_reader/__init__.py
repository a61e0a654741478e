"""Readers: their options, orders, states and passes."""
