"""The algorithms once more, slowly: plain Python floats, lists and loops, no tensors.

Nothing here imports the package under test, so that a mistake has to be made twice, in two
styles, to go unseen. Speed does not matter; that a formula can be read off the page does.
"""
