//! Runs the program on the public traces in `../shared`. They are not part of the repository, so
//! without them this test prints that it is skipped and passes, unless `ROOMMATE_REQUIRE_SHARED=1`.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is a test")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

fn shared(file: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("ROOMMATE_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"),
        PathBuf::from,
    );
    let path = folder.join(file);
    if path.is_file() {
        return Some(path);
    }
    let required = std::env::var("ROOMMATE_REQUIRE_SHARED").is_ok_and(|value| value == "1");
    assert!(!required, "../shared/{file} is absent, but ROOMMATE_REQUIRE_SHARED=1 asks for it");
    eprintln!("skipped: ../shared is absent");
    None
}

fn sim(trace: &Path, flags: &str) -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_roommate"))
        .arg("sim")
        .arg(trace)
        .args(flags.split_whitespace())
        .args(["-o", "json"])
        .output()
        .unwrap();
    assert!(out.status.success(), "{flags}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// The Tiresias artifact's own example with its rules: free restarts, GPUs counted, nodes ignored.
#[test]
fn the_tiresias_example_has_the_published_means() {
    let Some(trace) = shared("traces/tiresias/60_job.csv") else { return };
    for (policy, rule, mean_s) in [
        ("fifo", "rule=count", "200.8"),
        ("fifo-backfill", "rule=count", "190.7"),
        ("srtf", "rule=count", "192.1"),
        ("tiresias", "placement=count", "190.7"),
    ] {
        let flags = format!(
            "--cluster 4x4 --restart-cost 0 --no-spread-penalty --policy {policy} --set {rule}"
        );
        let result = sim(&trace, &flags);
        assert_eq!(format!("{:.1}", result["avg_jct_s"].as_f64().unwrap()), mean_s, "{policy}");
    }
}

/// On a real trace with queueing, knowing durations helps, and least attained service comes close.
#[test]
fn policies_rank_as_published_on_a_busy_venus() {
    let Some(trace) = shared("traces/helios/venus_gpu_jobs.csv.gz") else { return };
    let mean = |policy: &str| {
        let result = sim(&trace, &format!("--cluster 50x8 --policy {policy}"));
        assert_eq!(result["finished"], result["jobs"], "{policy}");
        result["avg_jct_s"].as_f64().unwrap()
    };
    let (fifo, backfill) = (mean("fifo"), mean("fifo-backfill"));
    let (srtf, tiresias) = (mean("srtf"), mean("tiresias"));
    assert!(
        srtf < tiresias && tiresias < backfill && backfill < fifo,
        "{srtf} {tiresias} {backfill} {fifo}"
    );
}
