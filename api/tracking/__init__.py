"""Jobs told to TensorBoard, MLflow and W&B: one run a job, over all its attempts. Libraries are imported when used."""
