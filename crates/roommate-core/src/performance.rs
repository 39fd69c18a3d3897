//! How fast a job runs, and what its steps are worth.
//!
//! ```text
//!  alone:     profile.step_s, or solo ── sensitivity (CPU, host memory) ── latency (services)
//!  together:  interference ── throttle (pace of best-effort jobs) ──→ effective_speed
//!  worth:     goodput (batch size, noise scale) ──→ progress (work done at an instant)
//! ```
//!
//! Invariants: a speed is relative to the job alone at its own batch size, 1 = undisturbed; work is
//! counted in steps of the user's own batch size; belief and truth go through the same functions.

pub mod effective_speed;
pub mod goodput;
pub mod latency;
pub mod pairs;
pub mod progress;
pub mod sensitivity;
pub mod slowdown_line;
pub mod solo;
pub mod throttle;
pub mod usage;
