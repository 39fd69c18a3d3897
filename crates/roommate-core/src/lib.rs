//! The decision core of Roommate: which deep-learning jobs share a GPU and how each runs there.
//!
//! Pure and deterministic. Facts and the time go in, actions come out ([`engine::Engine::step`]);
//! what it decided and why leaves as a [`journal`]. There is no clock, no IO, no thread and no
//! hash-map iteration in this crate, so the same facts give the same decisions in a simulator, on
//! one machine and on a cluster, and a journal replays byte for byte.
//!
//! # A tour, in reading order
//!
//! ```text
//!  facts ──→ engine ──→ state ──→ plan ←── policy ←── placement · queue · performance
//!              │                    │                 interference · measurement · math
//!              └── journal ←────────┴──→ actions
//! ```
//!
//! Vocabulary, small files that everything else is written in:
//! - [`idx`], [`time`], [`number`]: jobs, GPUs and nodes are dense indices, time is whole
//!   microseconds, amounts are finite.
//! - [`cluster`], [`job`], [`profile`], [`knobs`]: what there is, what a user requests, what is
//!   known of a job before it runs, how a job runs.
//! - [`event`], [`reason`]: facts and actions; why something was decided, as data.
//!
//! The loop:
//! - [`state`]: what is true now, with all accounts kept by two moves, occupy and vacate.
//! - [`plan`]: what a policy edits; every edit can be undone, and the difference becomes actions.
//! - [`engine`]: applies facts, decides when to ask the policy, commits its plan.
//!
//! Rooms, each a folder whose root file says what it is for:
//! - [`policy`]: the one trait, the registry, and a file or folder for each policy.
//! - [`placement`]: finding GPUs for a gang, making room, how long to insist on a compact place.
//! - [`queue`]: waiting lines whose walks cost shapes instead of jobs.
//! - [`performance`]: how fast a job runs and what its steps are worth.
//! - [`interference`]: how much roommates disturb each other, as belief and as truth.
//! - [`measurement`]: what was measured on real GPUs, and what follows from it.
//! - [`journal`]: the only exit; replay, metrics, charts and explanations are folds over it.
//! - [`math`]: solvers, searches, statistics; knows nothing of GPUs.
//! - [`testing`]: a slow world of ticks in which policies draw their pictures.

// Vocabulary.
pub mod cluster;
pub mod event;
pub mod idx;
pub mod job;
pub mod knobs;
pub mod number;
pub mod profile;
pub mod reason;
pub mod time;

// The loop.
pub mod engine;
pub mod plan;
pub mod state;

// Rooms.
pub mod interference;
pub mod journal;
pub mod math;
pub mod measurement;
pub mod performance;
pub mod placement;
pub mod policy;
pub mod queue;

// For tests of this crate and of the worlds.
pub mod testing;
