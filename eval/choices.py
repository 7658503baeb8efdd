"""Names to choose from, for the code that knows them and for the command line, which must not wait for that code."""

# What a press sees of the questions, see `run.grid.Unit`
PROTOCOLS = ("agnostic", "aware", "reuse")
# Wordings, see `run.chat.Chat`
STYLES = ("paper", "kvpress")
# How answers are judged, see `metrics.registry.metric_of`
SCORERS = ("paper", "official", "lenient")
# Whether presses keep as many pairs as kvzip-press would, or what they make of the plain fraction themselves
BUDGETS = ("equal", "plain")
