"""Where membership is pushed to, for those who route requests themselves."""
