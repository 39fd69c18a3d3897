//! What was measured on real GPUs, and what is made of it.

pub mod advice;
pub mod atlas;
pub mod contention;
pub mod known_profiles;
pub mod resource_predictor;
pub mod rows;
pub mod search;
