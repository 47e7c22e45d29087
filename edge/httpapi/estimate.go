package httpapi

// estimate answers a call that asks how long a prompt is where no provider of the
// model can tell. Coding tools ask often, and do with an estimate.
func (x *exchange) estimate() reason {
	x.w.Header()["X-Iop-Estimate"] = []string{"true"}
	return x.answer(struct {
		InputTokens int64 `json:"input_tokens"`
	}{x.want.PromptTokens})
}
