//! `roommate gpu-test` on a fake GPU (`tests/fake-gpu`): what a process can do there, with MPS
//! limits and without.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use serde_json::{Value, json};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// A folder with a substitute for the CUDA driver library.
struct Room(TempDir);

impl Room {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fake-gpu/cuda.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o"]).arg(folder.path().join("libcuda.so.1")).arg(source);
        assert!(cc.status().unwrap().success(), "cc must be installed: Rust links with it");
        Self(folder)
    }

    /// The program's report with these environment variables.
    fn look(&self, env: &[(&str, &str)]) -> Value {
        let out = Command::new(env!("CARGO_BIN_EXE_roommate"))
            .args(["gpu-test", "--device", "0", "--over-mib", "2048"])
            .env("ROOMMATE_CUDA_LIBRARY", self.0.path().join("libcuda.so.1"))
            .env("CUDA_MPS_PIPE_DIRECTORY", self.0.path())
            .envs(env.iter().copied())
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    }
}

const LIMITS: [(&str, &str); 2] =
    [("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50"), ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1024M")];

#[test]
fn enforced_limits_are_detected() {
    let room = Room::new();
    let free = room.look(&LIMITS);
    assert_eq!(free["sms"], 132);
    assert_eq!(free["over"], json!({"mib": 2048, "refused": null}));
    assert_eq!(free["kernel"], json!({"right": true, "on_sms": 132}));
    assert_eq!(free["error"], Value::Null);
    let _daemon = UnixListener::bind(room.0.path().join("control")).unwrap();
    let held = room.look(&LIMITS);
    assert_eq!((&held["sms"], &held["total_mib"]), (&json!(66), &json!(1024)));
    assert_eq!(held["over"], json!({"mib": 2048, "refused": "CUDA_ERROR_OUT_OF_MEMORY"}));
    assert_eq!(held["small"], json!({"mib": 16, "refused": null}));
    assert_eq!(held["kernel"], json!({"right": true, "on_sms": 66}));
}

#[test]
fn failures_are_in_the_report() {
    let room = Room::new();
    let of = |how| room.look(&[("FAKE_CUDA", how)]);
    let absent = of("absent");
    assert_eq!(absent["error"], "could not start the CUDA driver: CUDA_ERROR_NO_DEVICE");
    assert_eq!(absent["sms"], Value::Null);
    assert_eq!(of("wrong")["kernel"], json!({"right": false, "on_sms": 132}));
    let broken = of("broken");
    assert_eq!(broken["error"], "could not run a kernel: CUDA error 719");
    assert_eq!((&broken["sms"], &broken["kernel"]), (&json!(132), &Value::Null));
    let none = room.look(&[("ROOMMATE_CUDA_LIBRARY", "libno-such.so.1")]);
    assert!(none["error"].as_str().unwrap().contains("install NVIDIA's driver"), "{none}");
}
