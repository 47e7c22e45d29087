package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

const (
	healthBound  = 5 * time.Second
	maxHealthMsg = 4 << 10
)

// newHealthcheck is for container images, which have no shell and no curl.
func newHealthcheck() *cobra.Command {
	return &cobra.Command{
		Use:    "healthcheck URL",
		Short:  "Exit 0 if URL answers 200, else 1",
		Hidden: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{fmt.Errorf("healthcheck takes one URL, got %d arguments", len(args))}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), healthBound)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, args[0], nil)
			if err != nil {
				return usageError{err}
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return err
			}
			defer resp.Body.Close() // only read
			text, err := io.ReadAll(io.LimitReader(resp.Body, maxHealthMsg))
			if err != nil {
				return err
			}
			if resp.StatusCode != http.StatusOK {
				return fmt.Errorf("%s: %s", resp.Status, strings.TrimSpace(string(text)))
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), string(text))
			return err
		},
	}
}
