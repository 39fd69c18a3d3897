//! The decision core of Roommate: which deep-learning jobs share a GPU and how each runs there.
//!
//! Pure and deterministic. Facts and the time go in, actions come out ([`engine::Engine::step`]); what
//! it decided and why leaves as a [`journal`]. There is no clock, no IO, no thread and no hash-map
//! iteration in this crate, so the same facts give the same decisions in a simulator, on one machine
//! and on a cluster, and a journal replays byte for byte.

pub mod admission;
pub mod allocation;
pub mod batch;
pub mod board;
pub mod cluster;
pub mod engine;
pub mod event;
pub mod explain;
pub mod gantt;
pub mod goodput;
pub mod growth;
pub mod idx;
pub mod interference;
pub mod job;
pub mod journal;
pub mod knobs;
pub mod latency;
pub mod leases;
pub mod lodging;
pub mod math;
pub mod metrics;
pub mod occupancy;
pub mod place;
pub mod plan;
pub mod policy;
pub mod predict;
pub mod profile;
pub mod profiler;
pub mod progress;
pub mod queue;
pub mod rank;
pub mod replay;
pub mod rota;
pub mod round;
pub mod sensitivity;
pub mod state;
pub mod testing;
pub mod throttle;
pub mod tier;
pub mod time;
pub mod tuner;
pub mod tuning;
pub mod why;
