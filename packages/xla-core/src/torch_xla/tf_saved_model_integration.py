"""torch_xla.tf_saved_model_integration: saves exported models as TensorFlow SavedModels."""

from __future__ import annotations

import sys

from xla_core.export.saved_model import main as main
from xla_core.export.saved_model import make_tf_function as make_tf_function
from xla_core.export.saved_model import save_stablehlo_graph_as_tf as save_stablehlo_graph_as_tf
from xla_core.export.saved_model import (
    save_torch_module_as_tf_saved_model as save_torch_module_as_tf_saved_model,
)

if __name__ == "__main__":
    sys.exit(main())
