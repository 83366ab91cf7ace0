"""Help for mistakes: names of other libraries, objects in place of names, and explanations of torch's errors.

Nothing here runs in a step. `arguments` and `attributes` know what other libraries call an argument or a method, `names` what
they call a plug-in, `objects` converts arguments whose meaning is plain, `failures` explains an exception of the user's model
or loss, and `first_loss` checks the first batch of a fit.
"""
