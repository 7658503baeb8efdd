"""
Kernels side by side: ``python -m kvzip_press.kernels.bench --device cpu|cuda``.

Only the whole models in ``model.py`` and the replay layer in ``layer.py`` know transformers or presses, and they import
them when they run.
"""
