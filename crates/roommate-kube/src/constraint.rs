//! On which nodes a pod may run: selector, required node affinity and tolerations.

use crate::objects::{Condition, LabelSelector, Node, NodeTerm, Pod, Texts, Toleration};
use serde_json::json;

/// On which nodes a pod may run. Pods with equal constraints may run on the same nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Constraint {
    selector: Texts,
    /// Terms of which one has to hold; none = every node.
    terms: Option<Vec<NodeTerm>>,
    tolerations: Vec<Toleration>,
}

impl Constraint {
    /// The constraint of a pod.
    pub fn of(pod: &Pod) -> Self {
        let affinity = pod.spec.affinity.as_ref().and_then(|a| a.node_affinity.as_ref());
        let required =
            affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
        Self {
            selector: pod.spec.node_selector.clone().unwrap_or_default(),
            terms: required.map(|r| r.node_selector_terms.clone()),
            tolerations: pod.spec.tolerations.clone().unwrap_or_default(),
        }
    }

    /// Whether the pod may be bound to this node.
    pub fn allows(&self, node: &Node) -> bool {
        let empty = Texts::new();
        let labels = node.metadata.labels.as_ref().unwrap_or(&empty);
        let selected = self.selector.iter().all(|(key, value)| labels.get(key) == Some(value));
        let fits = |term: &NodeTerm| term_holds(term, labels, node.name());
        let affine = self.terms.as_ref().is_none_or(|terms| terms.iter().any(fits));
        let tolerated = |t: &crate::objects::Taint| {
            t.effect == "PreferNoSchedule" || self.tolerations.iter().any(|x| tolerates(x, t))
        };
        selected && affine && node.taints().iter().all(tolerated)
    }

    /// In words, for people whose pod fits on no node.
    pub fn describe(&self) -> String {
        let terms = self.terms.as_ref().map(|t| json!(t).to_string());
        let parts: Vec<String> = [
            (!self.selector.is_empty()).then(|| format!("node selector {}", json!(self.selector))),
            terms.map(|t| format!("node affinity {t}")),
        ]
        .into_iter()
        .flatten()
        .collect();
        if parts.is_empty() { "the taints of all nodes".into() } else { parts.join(" and ") }
    }
}

/// An empty term holds for no node, as in kube-scheduler.
fn term_holds(term: &NodeTerm, labels: &Texts, name: &str) -> bool {
    let (of_labels, of_fields) = (term.match_expressions.as_deref(), term.match_fields.as_deref());
    let empty = of_labels.is_none_or(<[_]>::is_empty) && of_fields.is_none_or(<[_]>::is_empty);
    let label = |c: &Condition| holds(c, labels.get(&c.key).map(String::as_str));
    let field = |c: &Condition| c.key == "metadata.name" && holds(c, Some(name));
    !empty
        && of_labels.unwrap_or(&[]).iter().all(label)
        && of_fields.unwrap_or(&[]).iter().all(field)
}

/// Whether a condition holds for this value of its label. One that is not understood holds never.
fn holds(condition: &Condition, value: Option<&str>) -> bool {
    let values = condition.values.as_deref().unwrap_or(&[]);
    let number = |text: &str| text.parse::<i64>().ok();
    let bound = values.first().and_then(|v| number(v));
    let own = value.and_then(number);
    match condition.operator.as_str() {
        "In" => value.is_some_and(|v| values.iter().any(|x| x == v)),
        "NotIn" => value.is_none_or(|v| values.iter().all(|x| x != v)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => own.zip(bound).is_some_and(|(own, bound)| own > bound),
        "Lt" => own.zip(bound).is_some_and(|(own, bound)| own < bound),
        _ => false,
    }
}

fn tolerates(toleration: &Toleration, taint: &crate::objects::Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect {
        return false;
    }
    let key = toleration.key.as_deref().unwrap_or_default();
    match toleration.operator.as_deref().unwrap_or("Equal") {
        "Exists" => key.is_empty() || key == taint.key,
        "Equal" => {
            let value = |v: &Option<String>| v.clone().unwrap_or_default();
            key == taint.key && value(&toleration.value) == value(&taint.value)
        }
        _ => false,
    }
}

/// Whether a selector selects a pod with these labels; none selects nothing, an empty one all.
pub fn selects(selector: Option<&LabelSelector>, labels: &Texts) -> bool {
    let Some(selector) = selector else { return false };
    let equal = |(key, value): (&String, &String)| labels.get(key) == Some(value);
    let labelled = selector.match_labels.iter().flatten().all(equal);
    let label = |c: &Condition| holds(c, labels.get(&c.key).map(String::as_str));
    labelled && selector.match_expressions.iter().flatten().all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: &serde_json::Value) -> Constraint {
        Constraint::of(&serde_json::from_value(json!({"spec": spec})).unwrap())
    }

    fn node(name: &str, labels: &serde_json::Value, taints: &serde_json::Value) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": labels}, "spec": {"taints": taints},
        }))
        .unwrap()
    }

    fn affine(terms: &serde_json::Value) -> Constraint {
        pod(&json!({"affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}}))
    }

    #[test]
    fn selectors_and_affinity_choose_nodes() {
        let a = node("a", &json!({"zone": "x", "gen": "7"}), &json!([]));
        let b = node("b", &json!({"zone": "y"}), &json!([]));
        let cases = [
            (pod(&json!({})), [true, true]),
            (pod(&json!({"nodeSelector": {"zone": "x"}})), [true, false]),
            (
                affine(&json!([{"matchExpressions": [
                    {"key": "zone", "operator": "In", "values": ["y", "z"]}]}])),
                [false, true],
            ),
            (
                affine(&json!([{"matchExpressions": [
                    {"key": "gen", "operator": "Gt", "values": ["6"]},
                    {"key": "zone", "operator": "NotIn", "values": ["y"]}]}])),
                [true, false],
            ),
            (
                affine(&json!([
                    {"matchExpressions": [{"key": "gen", "operator": "Exists"}]},
                    {"matchFields": [
                        {"key": "metadata.name", "operator": "In", "values": ["b"]}]}])),
                [true, true],
            ),
            // Nothing matches an empty term, or an operator that nobody knows.
            (affine(&json!([{}])), [false, false]),
            (
                affine(&json!([{"matchExpressions": [{"key": "zone", "operator": "Like"}]}])),
                [false, false],
            ),
        ];
        for (constraint, expect) in cases {
            assert_eq!([constraint.allows(&a), constraint.allows(&b)], expect, "{constraint:?}");
        }
    }

    #[test]
    fn taints_keep_pods_away_that_do_not_tolerate_them() {
        let tainted = node(
            "a",
            &json!({}),
            &json!([
                {"key": "team", "value": "red", "effect": "NoSchedule"},
                {"key": "slow", "effect": "PreferNoSchedule"},
            ]),
        );
        let with = |t: serde_json::Value| pod(&json!({"tolerations": t})).allows(&tainted);
        assert!(!with(json!([])));
        assert!(with(json!([{"key": "team", "value": "red"}])));
        assert!(!with(json!([{"key": "team", "value": "blue"}])));
        assert!(with(json!([{"key": "team", "operator": "Exists", "effect": "NoSchedule"}])));
        assert!(!with(json!([{"key": "team", "operator": "Exists", "effect": "NoExecute"}])));
        assert!(with(json!([{"operator": "Exists"}])));
        let cordoned: Node =
            serde_json::from_value(json!({"spec": {"unschedulable": true}})).unwrap();
        assert!(!pod(&json!({})).allows(&cordoned));
    }

    #[test]
    fn selectors_of_pods_select_by_labels() {
        let labels: Texts = [("app".to_string(), "x".to_string())].into();
        let read = |v: serde_json::Value| serde_json::from_value::<LabelSelector>(v).unwrap();
        assert!(!selects(None, &labels));
        assert!(selects(Some(&read(json!({}))), &labels));
        assert!(selects(Some(&read(json!({"matchLabels": {"app": "x"}}))), &labels));
        assert!(!selects(Some(&read(json!({"matchLabels": {"app": "y"}}))), &labels));
        let other = json!({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]});
        assert!(!selects(Some(&read(other)), &labels));
    }
}
