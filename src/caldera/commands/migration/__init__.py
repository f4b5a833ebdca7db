"""`caldera migrate`: what becomes of a launch script of verl's."""
