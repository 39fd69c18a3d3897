//! Measurements on real GPUs, and the models and advice made from them.
//!
//! ```text
//!  profiles/*.jsonl ──rows──→ atlas ──→ interference::measured (a truth)
//!                       │       └──── contention: the model for what was not measured
//!                       ├──→ resource_predictor: what a model takes, from its architecture
//!                       └──→ advice (how to run a measured set) ←→ search (what to measure next)
//! ```
//!
//! Invariants: what was measured is answered as measured, and only the rest by a model; rows are
//! read by one reader; nothing here is used by a policy while it decides.

pub mod advice;
pub mod atlas;
pub mod contention;
pub mod known_profiles;
pub mod resource_predictor;
pub mod rows;
pub mod search;
