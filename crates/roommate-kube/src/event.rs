//! Events of Kubernetes: what people are told of a pod or a node beside its state.

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

/// Most bytes of a message: more is cut.
const MOST_MESSAGE: usize = 1000;
/// The namespace of events of what has none.
const USUAL_NAMESPACE: &str = "default";

/// What an event is about.
#[derive(Clone, Copy, Debug)]
pub(crate) enum About<'a> {
    /// A pod: its namespace, its name and its unique id.
    Pod(&'a str, &'a str, &'a str),
    /// A node.
    Node(&'a str),
}

/// What an event says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Says<'a> {
    /// Whether people should look at it.
    pub(crate) warns: bool,
    /// `Scheduled`, for one.
    pub(crate) reason: &'static str,
    /// What was being done.
    pub(crate) action: &'static str,
    /// For people.
    pub(crate) note: &'a str,
}

/// The path and the body with which an event is created; `by` is the program and which one of its
/// processes.
pub(crate) fn event(about: About<'_>, says: Says<'_>, by: (&str, &str)) -> (String, Value) {
    let (namespace, name, regarding) = match about {
        About::Pod(namespace, name, uid) => {
            let pod = json!({"apiVersion": "v1", "kind": "Pod", "name": name,
                             "namespace": namespace, "uid": uid});
            (namespace, name, pod)
        }
        // As kubelets do: the uid of a node is its name.
        About::Node(name) => {
            let node = json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": name});
            (USUAL_NAMESPACE, name, node)
        }
    };
    let body = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event",
        // Named as kube-scheduler names them.
        "metadata": {"name": format!("{name}.{:x}", Timestamp::now().as_nanosecond()),
                     "namespace": namespace},
        "eventTime": now(), "type": if says.warns { "Warning" } else { "Normal" },
        "reason": says.reason, "action": says.action, "note": cut(says.note),
        "reportingController": by.0, "reportingInstance": by.1, "regarding": regarding,
    });
    (format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events"), body)
}

/// The time as the API server writes it.
pub(crate) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

/// As much of a message as is written.
pub(crate) fn cut(text: &str) -> &str {
    let mut end = text.len().min(MOST_MESSAGE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_cut_between_characters() {
        assert_eq!(cut("short"), "short");
        let long = "é".repeat(800);
        assert_eq!(cut(&long).len(), 1000);
        assert_eq!(cut(&format!("x{long}")).len(), 999);
    }

    #[test]
    fn events_of_nodes_are_where_kubelets_write_theirs() {
        let says = Says { warns: true, reason: "GpuUnhealthy", action: "Probing", note: "x" };
        let (path, body) = event(About::Node("n"), says, ("roommate-agent", "n"));
        assert_eq!(path, "/apis/events.k8s.io/v1/namespaces/default/events");
        assert_eq!((&body["type"], &body["regarding"]["uid"]), (&json!("Warning"), &json!("n")));
    }
}
