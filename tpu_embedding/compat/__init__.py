"""Private: runs programs of TensorFlow 1, of TPUs and of TFRS unchanged.

Only the command line and the public names `te.estimator`, `te.interop`, `te.install`
and `te.uninstall` import it.
"""

__all__: list[str] = []
