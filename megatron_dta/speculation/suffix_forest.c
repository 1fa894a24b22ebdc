/* Depth-bounded suffix trees with counts: the drafter's inner loops. See suffix_forest.py for what they compute; the
 * class there in plain Python is the twin of this file, and both must give the same drafts bit for bit.
 *
 * All trees share one pool of nodes, one hash table of edges (parent, first token) -> child and one store of texts. An
 * edge's tokens are a reference into a text. Every path from a root is the reference's own text read backwards as well
 * (text[position - depth of the parent ..]), so joining a node with its only child needs no other text. A text whose
 * suffixes were removed is kept while edges still refer to it; inserting moves references to the newest text.
 *
 * Structure is canonical: an inner node has two children or more, or a suffix ends at it. It depends on the suffixes in
 * the tree, not on the order in which they came, and so do counts, best children (largest count, then lowest token) and
 * drafts.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NONE 0u
#define UNKNOWN 0xFFFFFFFFu /* of best: to be found among the children when it is needed */
#define MAX_DEPTH 255

typedef struct {
    int32_t token;     /* first token of the edge */
    uint32_t parent, count, text, position;
    uint32_t child, next, previous; /* first child; siblings */
    uint32_t best;     /* most frequent child */
    uint32_t length;   /* tokens of the edge */
} Node;

typedef struct {
    int32_t *tokens;
    uint32_t length, capacity;
    uint32_t references; /* edges that refer to it */
    uint32_t begin;      /* first suffix that is inserted */
    uint32_t inserted;   /* suffixes [begin, inserted) are in the trees with all their depth, */
    uint32_t early;      /* and [inserted, early) cut at the early depth */
    uint32_t roots[2];
    uint8_t used, open;
} Text;

typedef struct {
    uint32_t depth, early_depth;
    Node *nodes;
    uint32_t num_nodes, node_capacity, free_node, live_nodes;
    uint32_t *slots; /* hash table of edges */
    uint32_t slot_mask, num_edges;
    Text *texts;
    uint32_t num_texts, text_capacity, free_text;
    int64_t text_bytes;
    int failed; /* out of memory: the forest must not be used again */
} Forest;

static inline uint32_t hash_edge(uint32_t parent, int32_t token) {
    uint64_t h = ((uint64_t)parent << 32) | (uint32_t)token;
    h *= 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93ull;
    return (uint32_t)(h >> 32);
}

/* ---- edges ---- */

static inline uint32_t find_slot(const Forest *f, uint32_t parent, int32_t token) {
    uint32_t slot = hash_edge(parent, token) & f->slot_mask;
    for (uint32_t node; (node = f->slots[slot]) != NONE; slot = (slot + 1) & f->slot_mask)
        if (f->nodes[node].parent == parent && f->nodes[node].token == token) break;
    return slot;
}

static inline uint32_t find_child(const Forest *f, uint32_t parent, int32_t token) {
    const Node *p = &f->nodes[parent];
    if (p->child == NONE) return NONE;
    /* Most steps go to the best child; one compare is cheaper than the table. */
    if (p->best != UNKNOWN && f->nodes[p->best].token == token) return p->best;
    return f->slots[find_slot(f, parent, token)];
}

static int reserve_edges(Forest *f, uint32_t more) {
    uint64_t need = (uint64_t)f->num_edges + more;
    if (need * 4 < ((uint64_t)f->slot_mask + 1) * 3) return 0;
    uint64_t size = ((uint64_t)f->slot_mask + 1) * 2;
    if (size > 0x80000000ull) return -1;
    uint32_t *old = f->slots, old_size = f->slot_mask + 1;
    uint32_t *slots = calloc(size, sizeof(uint32_t));
    if (!slots) return -1;
    f->slots = slots;
    f->slot_mask = (uint32_t)(size - 1);
    for (uint32_t i = 0; i < old_size; i++) {
        if (old[i] == NONE) continue;
        uint32_t slot = hash_edge(f->nodes[old[i]].parent, f->nodes[old[i]].token) & f->slot_mask;
        while (f->slots[slot] != NONE) slot = (slot + 1) & f->slot_mask;
        f->slots[slot] = old[i];
    }
    free(old);
    return 0;
}

static void erase_edge(Forest *f, uint32_t parent, int32_t token) {
    uint32_t hole = find_slot(f, parent, token);
    uint32_t slot = hole;
    for (;;) { /* close the hole with the entries that were pushed past it */
        slot = (slot + 1) & f->slot_mask;
        uint32_t node = f->slots[slot];
        if (node == NONE) break;
        uint32_t home = hash_edge(f->nodes[node].parent, f->nodes[node].token) & f->slot_mask;
        if (((slot - home) & f->slot_mask) >= ((slot - hole) & f->slot_mask)) {
            f->slots[hole] = node;
            hole = slot;
        }
    }
    f->slots[hole] = NONE;
    f->num_edges--;
}

/* ---- nodes and texts ---- */

static int reserve_nodes(Forest *f, uint32_t more) {
    if ((uint64_t)f->num_nodes + more < f->node_capacity) return 0;
    uint64_t capacity = (uint64_t)f->node_capacity + f->node_capacity / 4 + more + 1024;
    if (capacity >= UNKNOWN) return -1;
    Node *nodes = realloc(f->nodes, capacity * sizeof(Node));
    if (!nodes) return -1;
    f->nodes = nodes;
    f->node_capacity = (uint32_t)capacity;
    return 0;
}

static uint32_t new_node(Forest *f) {
    uint32_t node = f->free_node;
    if (node != NONE) f->free_node = f->nodes[node].next;
    else node = f->num_nodes++;
    memset(&f->nodes[node], 0, sizeof(Node));
    f->live_nodes++;
    return node;
}

static void free_text_if_unused(Forest *f, uint32_t text) {
    Text *t = &f->texts[text];
    if (t->used || t->references) return;
    free(t->tokens);
    f->text_bytes -= (int64_t)t->capacity * 4;
    memset(t, 0, sizeof(Text));
    t->capacity = 0;
    t->begin = f->free_text;
    f->free_text = text;
}

static inline void refer(Forest *f, Node *node, uint32_t text, uint32_t position) {
    if (node->text != text) {
        uint32_t old = node->text;
        f->texts[text].references++;
        node->text = text;
        if (--f->texts[old].references == 0) free_text_if_unused(f, old);
    }
    node->position = position;
}

static void delete_node(Forest *f, uint32_t node) {
    uint32_t text = f->nodes[node].text;
    f->texts[text].references--;
    f->nodes[node].next = f->free_node;
    f->free_node = node;
    f->live_nodes--;
    free_text_if_unused(f, text);
}

static inline void consider_best(Node *nodes, uint32_t parent, uint32_t child) {
    uint32_t best = nodes[parent].best;
    if (best == UNKNOWN || best == child) return;
    if (best == NONE || nodes[child].count > nodes[best].count ||
        (nodes[child].count == nodes[best].count && nodes[child].token < nodes[best].token))
        nodes[parent].best = child;
}

static uint32_t best_child(Forest *f, uint32_t parent) {
    Node *nodes = f->nodes;
    if (nodes[parent].best == UNKNOWN) {
        nodes[parent].best = NONE;
        for (uint32_t c = nodes[parent].child; c != NONE; c = nodes[c].next) consider_best(nodes, parent, c);
    }
    return nodes[parent].best;
}

/* `node` takes the place of `old` among its siblings and in the table; both have the same first token. */
static void replace_child(Forest *f, uint32_t old, uint32_t node) {
    Node *nodes = f->nodes;
    uint32_t parent = nodes[old].parent;
    f->slots[find_slot(f, parent, nodes[old].token)] = node;
    nodes[node].parent = parent;
    nodes[node].next = nodes[old].next;
    nodes[node].previous = nodes[old].previous;
    if (nodes[node].next != NONE) nodes[nodes[node].next].previous = node;
    if (nodes[node].previous != NONE) nodes[nodes[node].previous].next = node;
    else nodes[parent].child = node;
    if (nodes[parent].best == old) nodes[parent].best = node;
}

static void add_only_child(Forest *f, uint32_t parent, uint32_t node) {
    Node *nodes = f->nodes;
    nodes[node].parent = parent;
    nodes[node].next = nodes[parent].child;
    nodes[node].previous = NONE;
    if (nodes[node].next != NONE) nodes[nodes[node].next].previous = node;
    nodes[parent].child = node;
    f->slots[find_slot(f, parent, nodes[node].token)] = node;
    f->num_edges++;
}

/* Cut the edge to `lower` after `length` tokens; returns the new node above it. */
static uint32_t split(Forest *f, uint32_t lower, uint32_t length) {
    uint32_t upper = new_node(f);
    Node *nodes = f->nodes;
    nodes[upper].token = nodes[lower].token;
    nodes[upper].count = nodes[lower].count;
    nodes[upper].text = nodes[lower].text;
    f->texts[nodes[lower].text].references++;
    nodes[upper].position = nodes[lower].position;
    nodes[upper].length = length;
    replace_child(f, lower, upper);
    nodes[lower].position += length;
    nodes[lower].length -= length;
    nodes[lower].token = f->texts[nodes[lower].text].tokens[nodes[lower].position];
    add_only_child(f, upper, lower);
    nodes[upper].best = lower;
    return upper;
}

/* Join `node` with its only child where no suffix ends between them. */
static void join(Forest *f, uint32_t node, uint32_t root) {
    Node *nodes = f->nodes;
    uint32_t child = nodes[node].child;
    if (node == root || child == NONE || nodes[child].next != NONE || nodes[child].count != nodes[node].count) return;
    erase_edge(f, node, nodes[child].token);
    nodes[child].position -= nodes[node].length;
    nodes[child].length += nodes[node].length;
    nodes[child].token = nodes[node].token;
    replace_child(f, node, child);
    delete_node(f, node);
}

/* ---- one suffix ---- */

static void insert_suffix(Forest *f, uint32_t root, uint32_t text, uint32_t start, uint32_t length) {
    const int32_t *tokens = f->texts[text].tokens;
    uint32_t node = root, done = 0;
    f->nodes[root].count++;
    while (done < length) {
        uint32_t child = find_child(f, node, tokens[start + done]);
        if (child == NONE) {
            child = new_node(f);
            Node *c = &f->nodes[child];
            c->token = tokens[start + done];
            c->count = 1;
            c->text = text;
            c->position = start + done;
            c->length = length - done;
            f->texts[text].references++;
            add_only_child(f, node, child);
            consider_best(f->nodes, node, child);
            return;
        }
        Node *c = &f->nodes[child];
        const int32_t *edge = f->texts[c->text].tokens + c->position, *own = tokens + start + done;
        uint32_t most = c->length < length - done ? c->length : length - done, same = 1;
        while (same < most && edge[same] == own[same]) same++;
        if (same < c->length) child = split(f, child, same);
        f->nodes[child].count++;
        refer(f, &f->nodes[child], text, start + done);
        consider_best(f->nodes, node, child);
        node = child;
        done += same;
    }
}

static int remove_suffix(Forest *f, uint32_t root, uint32_t text, uint32_t start, uint32_t length) {
    const int32_t *tokens = f->texts[text].tokens;
    Node *nodes = f->nodes;
    uint32_t node = root, done = 0;
    nodes[root].count--;
    while (done < length) {
        uint32_t child = find_child(f, node, tokens[start + done]);
        if (child == NONE) return -1;
        if (nodes[node].best == child) nodes[node].best = UNKNOWN;
        if (--nodes[child].count == 0) {
            erase_edge(f, node, nodes[child].token);
            if (nodes[child].next != NONE) nodes[nodes[child].next].previous = nodes[child].previous;
            if (nodes[child].previous != NONE) nodes[nodes[child].previous].next = nodes[child].next;
            else nodes[node].child = nodes[child].next;
            if (nodes[node].child == NONE) nodes[node].best = NONE;
            delete_node(f, child);
            break;
        }
        done += nodes[child].length;
        node = child;
    }
    join(f, node, root);
    return 0;
}

/* ---- the interface ---- */

void *sf_new(int32_t depth, int32_t early_depth) {
    Forest *f = calloc(1, sizeof(Forest));
    if (!f) return NULL;
    f->depth = (uint32_t)depth;
    f->early_depth = (uint32_t)early_depth;
    f->slot_mask = 1023;
    f->slots = calloc(1024, sizeof(uint32_t));
    f->num_nodes = f->num_texts = 1; /* 0 means none */
    f->node_capacity = f->text_capacity = 64;
    f->nodes = calloc(64, sizeof(Node));
    f->texts = calloc(64, sizeof(Text));
    if (f->slots && f->nodes && f->texts) return f;
    free(f->slots), free(f->nodes), free(f->texts), free(f);
    return NULL;
}

void sf_delete(void *forest) {
    Forest *f = forest;
    for (uint32_t i = 1; i < f->num_texts; i++) free(f->texts[i].tokens);
    free(f->texts), free(f->nodes), free(f->slots), free(f);
}

/* A new tree; returns its root, 0 where memory is short. */
uint32_t sf_new_tree(void *forest) {
    Forest *f = forest;
    if (f->failed || reserve_nodes(f, 1)) return NONE;
    return new_node(f);
}

/* Gives an empty tree's root back; -1 where it is not empty. */
int32_t sf_delete_tree(void *forest, uint32_t root) {
    Forest *f = forest;
    if (f->nodes[root].child != NONE || f->nodes[root].count) return -1;
    f->nodes[root].next = f->free_node;
    f->free_node = root;
    f->live_nodes--;
    return 0;
}

/* A new text for up to two trees (0: none), whose suffixes from `begin` on will be inserted. */
uint32_t sf_new_text(void *forest, uint32_t first_root, uint32_t second_root, uint32_t begin) {
    Forest *f = forest;
    uint32_t text = f->free_text;
    if (f->failed) return NONE;
    if (text != NONE) {
        f->free_text = f->texts[text].begin;
    } else {
        if (f->num_texts == f->text_capacity) {
            Text *texts = realloc(f->texts, (size_t)f->text_capacity * 2 * sizeof(Text));
            if (!texts) return NONE;
            f->texts = texts;
            f->text_capacity *= 2;
        }
        text = f->num_texts++;
    }
    memset(&f->texts[text], 0, sizeof(Text));
    f->texts[text].used = f->texts[text].open = 1;
    f->texts[text].begin = f->texts[text].inserted = f->texts[text].early = begin;
    f->texts[text].roots[0] = first_root;
    f->texts[text].roots[1] = second_root;
    return text;
}

static int insert(Forest *f, uint32_t text, uint32_t start, uint32_t length) {
    if (reserve_nodes(f, 4) || reserve_edges(f, 4)) {
        f->failed = 1;
        return -1;
    }
    for (int i = 0; i < 2; i++)
        if (f->texts[text].roots[i] != NONE) insert_suffix(f, f->texts[text].roots[i], text, start, length);
    return 0;
}

static int take_out(Forest *f, uint32_t text, uint32_t start, uint32_t length) {
    for (int i = 0; i < 2; i++)
        if (f->texts[text].roots[i] != NONE && remove_suffix(f, f->texts[text].roots[i], text, start, length))
            return -1;
    return 0;
}

/* Inserts the suffixes before `end` for good, and those before `early_end` cut at the early depth. */
static int insert_until(Forest *f, uint32_t text, int64_t end, int64_t early_end) {
    Text *t = &f->texts[text];
    for (; (int64_t)t->inserted < end; t->inserted++) {
        uint32_t left = t->length - t->inserted, length = left < f->depth ? left : f->depth;
        /* The early one is taken out last: its nodes are on the path of the other. */
        if (insert(f, text, t->inserted, length)) return -1;
        if (t->inserted < t->early && take_out(f, text, t->inserted, f->early_depth)) return -1;
    }
    if (t->early < t->inserted) t->early = t->inserted;
    for (; (int64_t)t->early < early_end; t->early++)
        if (insert(f, text, t->early, f->early_depth)) return -1;
    return 0;
}

/* Append to n texts tokens[offsets[i] .. offsets[i + 1]); inserts the suffixes that now are long enough. */
int32_t sf_extend(void *forest, int32_t n, const uint32_t *texts, const int32_t *tokens, const int64_t *offsets) {
    Forest *f = forest;
    for (int32_t i = 0; i < n; i++) {
        Text *t = &f->texts[texts[i]];
        uint32_t more = (uint32_t)(offsets[i + 1] - offsets[i]);
        if (f->failed) return -1;
        if (t->length + more > t->capacity) {
            uint32_t capacity = t->length + more;
            if (t->length) capacity += capacity / 4 + 16;
            int32_t *grown = realloc(t->tokens, (size_t)capacity * 4);
            if (!grown) return -1;
            f->text_bytes += (int64_t)(capacity - t->capacity) * 4;
            t->tokens = grown;
            t->capacity = capacity;
        }
        memcpy(t->tokens + t->length, tokens + offsets[i], (size_t)more * 4);
        t->length += more;
        int64_t length = t->length;
        if (insert_until(f, texts[i], length - f->depth + 1, length - f->early_depth + 1)) return -1;
    }
    return 0;
}

/* No token will follow: inserts the suffixes that are shorter than the depth. */
int32_t sf_finish(void *forest, uint32_t text) {
    Forest *f = forest;
    Text *t = &f->texts[text];
    if (f->failed || insert_until(f, text, t->length, 0)) return -1;
    t->open = 0;
    if (t->capacity > t->length && t->length) {
        int32_t *fitted = realloc(t->tokens, (size_t)t->length * 4);
        if (fitted) {
            f->text_bytes -= (int64_t)(t->capacity - t->length) * 4;
            t->tokens = fitted;
            t->capacity = t->length;
        }
    }
    return 0;
}

int32_t sf_remove(void *forest, uint32_t text) {
    Forest *f = forest;
    if (f->failed) return -1;
    const Text *t = &f->texts[text];
    for (uint32_t start = t->begin; start < t->early || start < t->inserted; start++) {
        uint32_t left = t->length - start, length = left < f->depth ? left : f->depth;
        if (take_out(f, text, start, start < t->inserted ? length : f->early_depth)) return -1;
    }
    f->texts[text].used = 0;
    free_text_if_unused(f, text);
    return 0;
}

typedef struct {
    double score;
    int32_t length, match, tree, support;
} Draft;

/* The greedy continuation from `consumed` tokens into the edge to `node`; returns its length. */
static int32_t walk(Forest *f, uint32_t node, uint32_t consumed, int32_t most, double least, int32_t *tokens,
                    double *probabilities, double *score) {
    double probability = 1.0, sum = 0.0;
    int32_t length = 0;
    while (length < most) {
        const Node *n = &f->nodes[node];
        if (consumed == n->length) {
            uint32_t child = best_child(f, node);
            if (child == NONE) break;
            probability *= (double)f->nodes[child].count / (double)f->nodes[node].count;
            if (probability < least) break;
            node = child;
            consumed = 0;
            n = &f->nodes[node];
        }
        tokens[length] = f->texts[n->text].tokens[n->position + consumed];
        probabilities[length++] = probability;
        sum += probability;
        consumed++;
    }
    *score = sum;
    return length;
}

/* Drafts for n texts from their own last tokens. Arrays of [n] and, row by row, [n, width]. */
int32_t sf_draft(void *forest, int32_t n, const uint32_t *texts, const int32_t *most, int32_t width, double factor,
                 double offset, double least, int32_t *tokens, double *probabilities, int32_t *lengths,
                 int32_t *matches, int32_t *trees, int32_t *supports, double *scores) {
    Forest *f = forest;
    int32_t walk_tokens[MAX_DEPTH];
    double walk_probabilities[MAX_DEPTH];
    if (f->failed) return -1;
    for (int32_t i = 0; i < n; i++) {
        Draft best = {0.0, 0, 0, -1, 0};
        const Text *t = &f->texts[texts[i]];
        const int32_t *end = t->tokens + t->length;
        int32_t cap = most[i] < width ? most[i] : width;
        for (int tree = 0; tree < 2 && cap > 0; tree++) {
            if (t->roots[tree] == NONE) continue;
            for (uint32_t match = 1; match < f->depth && match <= t->length; match++) {
                double budget = match * factor + offset;
                int32_t allowed = budget < cap ? (int32_t)budget : cap;
                if (allowed > (int32_t)(f->depth - match)) allowed = (int32_t)(f->depth - match);
                if (allowed <= 0 || allowed < best.score) continue; /* probabilities of 1 would not win */
                const int32_t *context = end - match;
                uint32_t node = t->roots[tree], done = 0, consumed = 0;
                while (done < match) { /* where the last `match` tokens lead from the root */
                    node = find_child(f, node, context[done]);
                    if (node == NONE) break;
                    const Node *c = &f->nodes[node];
                    const int32_t *edge = f->texts[c->text].tokens + c->position;
                    uint32_t limit = c->length < match - done ? c->length : match - done;
                    for (consumed = 1; consumed < limit && edge[consumed] == context[done + consumed];) consumed++;
                    if (consumed < limit) node = NONE;
                    if (node == NONE) break;
                    done += consumed;
                }
                if (node == NONE) break; /* longer ones are absent too */
                double score;
                int32_t length = walk(f, node, consumed, allowed, least, walk_tokens, walk_probabilities, &score);
                if (length && (score > best.score || (score == best.score && best.tree == tree))) {
                    best = (Draft){score, length, (int32_t)match, tree, (int32_t)f->nodes[node].count};
                    memcpy(tokens + (int64_t)i * width, walk_tokens, (size_t)length * 4);
                    memcpy(probabilities + (int64_t)i * width, walk_probabilities, (size_t)length * 8);
                }
            }
        }
        lengths[i] = best.length;
        matches[i] = best.match;
        trees[i] = best.tree;
        supports[i] = best.support;
        scores[i] = best.score;
    }
    return 0;
}

/* A text's tokens, valid until the forest changes, and how many they are. */
const int32_t *sf_tokens(void *forest, uint32_t text, int64_t *length) {
    Forest *f = forest;
    *length = f->texts[text].length;
    return f->texts[text].tokens;
}

/* How often `pattern` [n] stands in a tree; for tests. */
int64_t sf_count(void *forest, uint32_t root, int32_t n, const int32_t *pattern) {
    Forest *f = forest;
    uint32_t node = root;
    for (int32_t done = 0; done < n;) {
        node = find_child(f, node, pattern[done]);
        if (node == NONE) return 0;
        const Node *c = &f->nodes[node];
        for (uint32_t k = 0; k < c->length && done < n; k++, done++)
            if (f->texts[c->text].tokens[c->position + k] != pattern[done]) return 0;
    }
    return f->nodes[node].count;
}

/* Live nodes (roots among them), and bytes held. */
void sf_size(void *forest, int64_t *size) {
    Forest *f = forest;
    size[0] = f->live_nodes;
    size[1] = (int64_t)sizeof(Forest) + (int64_t)f->node_capacity * sizeof(Node) +
              ((int64_t)f->slot_mask + 1) * 4 + (int64_t)f->text_capacity * sizeof(Text) + f->text_bytes;
}
