//! Measurements on real GPUs, and the models and advice made from them.

pub mod advice;
pub mod atlas;
pub mod contention;
pub mod known_profiles;
pub mod resource_predictor;
pub mod rows;
pub mod search;
