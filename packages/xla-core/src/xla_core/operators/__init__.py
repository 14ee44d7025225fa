"""What is known of one operator: schema, shapes and dtypes of results, lowering rule."""
