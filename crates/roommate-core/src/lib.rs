//! The decision core of Roommate: which deep-learning jobs share a GPU and how each runs there.
//!
//! Pure and deterministic. Facts and the time go in, actions come out ([`engine::Engine::step`]); what
//! it decided and why leaves as a [`journal`]. There is no clock, no IO, no thread and no hash-map
//! iteration in this crate, so the same facts give the same decisions in a simulator, on one machine
//! and on a cluster, and a journal replays byte for byte.

pub mod cluster;
pub mod engine;
pub mod event;
pub mod idx;
pub mod interference;
pub mod job;
pub mod journal;
pub mod knobs;
pub mod math;
pub mod measurement;
pub mod performance;
pub mod placement;
pub mod plan;
pub mod policy;
pub mod profile;
pub mod queue;
pub mod reason;
pub mod state;
pub mod testing;
pub mod time;
