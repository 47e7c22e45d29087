// ratios prints, from load's JSON lines, what a target costs beside the bare hop
// of the same run: latencies as what each adds to `direct`, the rest as they are.
//
//	ratios -hop nats-min-embedded -of iop out/*.jsonl
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// metric is one row of the goals in docs/performance.md.
type metric struct {
	file, key, name string
	added           bool    // compare what is added to direct
	goal            float64 // at most, or at least where more is better
	more            bool
}

var metrics = []metric{
	{"json-c1", "lat_p50_us", "small JSON, added p50, 1 caller", true, 1.20, false},
	{"json-c1", "best_lat_p50_us", "small JSON, added p50, 1 caller, best round", true, 1.20, false},
	{"json-c1", "lat_p99_us", "small JSON, p99, 1 caller", true, 1.3, false},
	{"json-c1", "cpu_s_per_1k_req", "CPU per 1,000 calls, 1 caller", false, 1.25, false},
	{"json-c16", "rps", "calls/s, 16 callers", false, 0.80, true},
	{"json-c16", "cpu_s_per_1k_req", "CPU per 1,000 calls, 16 callers", false, 1.25, false},
	{"stream-paced", "best_chunk_p50_us", "chunk, added p50, paced, best round", true, 1.20, false},
	{"stream-paced", "best_chunk_p99_us", "chunk, added p99, paced, best round", true, 1.3, false},
	{"stream-paced", "ttfb_p50_us", "first byte p50, 32 streams", false, 1.25, false},
	{"stream-paced", "cpu_s_per_1m_chunks", "CPU per chunk, paced", false, 1.20, false},
	{"stream-max", "chunks_per_s", "chunks/s, saturated", false, 0.80, true},
	{"stream-max", "cpu_s_per_1m_chunks", "CPU per chunk, saturated", false, 1.25, false},
	{"download", "MB_per_s", "bulk download MB/s", false, 0.85, true},
	{"download", "cpu_s_per_GB", "CPU per GB, download", false, 1.18, false},
	{"upload", "MB_per_s", "bulk upload MB/s", false, 0.85, true},
	{"upload", "cpu_s_per_GB", "CPU per GB, upload", false, 1.18, false},
	{"idle", "kib_per_stream", "KiB per idle stream, all processes", false, 1.2, false},
	{"cancel", "cancel_p50_us", "cancel p50", false, 1.15, false},
}

func main() {
	hop := flag.String("hop", "nats-min-embedded", "the bare hop's target name")
	of := flag.String("of", "iop", "the target to judge")
	flag.Parse()
	rows := map[string]map[string]map[string]any{} // file, target
	for _, path := range flag.Args() {
		fh, err := os.Open(path)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			continue
		}
		name := strings.TrimSuffix(filepath.Base(path), ".jsonl")
		rows[name] = map[string]map[string]any{}
		sc := bufio.NewScanner(fh)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			var m map[string]any
			if json.Unmarshal(sc.Bytes(), &m) == nil && m["summary"] == true {
				rows[name][fmt.Sprint(m["target"])] = m
			}
		}
		fh.Close()
	}
	fmt.Printf("\n| metric | direct | %s | %s | ratio | goal | |\n|---|---|---|---|---|---|---|\n", *hop, *of)
	for _, m := range metrics {
		get := func(target string) (float64, bool) {
			v, ok := rows[m.file][target][m.key].(float64)
			return v, ok
		}
		d, _ := get("direct")
		h, okH := get(*hop)
		p, okP := get(*of)
		if !okH || !okP {
			continue
		}
		hv, pv := h, p
		if m.added {
			hv, pv = h-d, p-d
		}
		ratio, sign := pv/hv, "<="
		good := ratio <= m.goal
		if m.more {
			sign, good = ">=", ratio >= m.goal
		}
		mark := "ok"
		if !good {
			mark = "**missed**"
		}
		fmt.Printf("| %s | %.4g | %.4g | %.4g | %.2fx | %s %.2fx | %s |\n", m.name, d, h, p, ratio, sign, m.goal, mark)
	}
	for file, targets := range rows {
		for name, m := range targets {
			for _, k := range []string{"errs", "incomplete", "out_of_order", "never"} {
				if v, ok := m[k].(float64); ok && v > 0 {
					fmt.Printf("\n%s: %s: %s = %g %v\n", file, name, k, v, m["first_err"])
				}
			}
		}
	}
}
