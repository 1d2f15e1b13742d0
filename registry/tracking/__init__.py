"""The registry's server side: MLflow, filled from journals, and its UI. Imported only when it is used."""
