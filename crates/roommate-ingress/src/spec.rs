//! What the front is told about its service.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A service, as the machine describes it to its front.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Name of the job.
    pub name: String,
    /// Name of the model in requests.
    pub model: String,
    /// Address to listen at.
    pub listen: String,
    /// The latency that requests have to keep.
    pub objective: Objective,
    /// Requests in a batch at most.
    pub max_batch: u32,
    /// How long a batch is filled at most, ms; absent = the front chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill_ms: Option<f64>,
    /// Requests that wait at most; more are refused.
    #[serde(default = "usual_queue")]
    pub queue: u32,
    /// What answers.
    pub server: Server,
}

/// A latency that a part of the requests has to keep.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Objective {
    /// The part of the requests, above 0 and below 1.
    pub quantile: f64,
    /// The latency, ms.
    pub ms: f64,
}

/// What answers the requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Server {
    /// A worker with the SDK, to which batches are handed.
    Sdk {},
    /// A model server of any kind, to which requests are passed on.
    Http {
        /// Its port; 0 = a free one, which it learns from `$PORT`.
        #[serde(default)]
        port: u16,
        /// A path that answers with a status below 400 when it is ready.
        #[serde(default = "usual_health")]
        health: String,
    },
}

fn usual_queue() -> u32 {
    1024
}

fn usual_health() -> String {
    "/health".into()
}

impl Spec {
    /// Parses and checks the text that the machine passes.
    pub fn read(text: &str) -> Result<Self, String> {
        let spec: Self = serde_json::from_str(text).map_err(|e| format!("--spec: {e}"))?;
        let Objective { quantile, ms } = spec.objective;
        let wrong = if !(quantile > 0.0 && quantile < 1.0) {
            "objective.quantile is not between 0 and 1"
        } else if !(ms > 0.0 && ms <= 3.6e6) {
            "objective.ms is not between 0 and an hour"
        } else if !spec.fill_ms.is_none_or(|fill| (0.0..=60_000.0).contains(&fill)) {
            "fill_ms is not between 0 and a minute"
        } else if spec.max_batch == 0 || spec.queue == 0 {
            "max_batch and queue are at least 1"
        } else {
            return Ok(spec);
        };
        Err(format!("--spec: {wrong}"))
    }

    /// The objective.
    pub(crate) fn objective(&self) -> Duration {
        Duration::from_secs_f64(self.objective.ms / 1e3)
    }

    /// How long a batch is filled at most.
    pub(crate) fn fill(&self) -> Option<Duration> {
        self.fill_ms.map(|ms| Duration::from_secs_f64(ms / 1e3))
    }

    /// How long a request is kept before it is given up: far beyond the objective, so that one slow
    /// batch loses nothing, and soon enough for a client to try elsewhere.
    pub(crate) fn patience(&self) -> Duration {
        (self.objective() * 10).max(Duration::from_secs(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) const TEXT: &str = r#"{"name":"a","model":"a","listen":"127.0.0.1:0","objective":
        {"quantile":0.99,"ms":25.0},"max_batch":32,"fill_ms":2.0,"server":{"sdk":{}}}"#;

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(Spec::read(TEXT).unwrap().queue, 1024);
        let with = |a: &str, b: &str| Spec::read(&TEXT.replace(a, b)).unwrap_err();
        assert!(with("0.99", "1.0").contains("quantile"));
        assert!(with("25.0", "0.0").contains("objective.ms"));
        assert!(with("\"max_batch\":32", "\"max_batch\":0").contains("max_batch"));
        assert!(with("\"fill_ms\":2.0", "\"fill_ms\":-1").contains("fill_ms"));
        assert!(with("sdk", "grpc").contains("unknown variant"));
        let http = TEXT.replace(r#"{"sdk":{}}"#, r#"{"http":{}}"#);
        let usual = Server::Http { port: 0, health: "/health".into() };
        assert_eq!(Spec::read(&http).unwrap().server, usual);
    }
}
