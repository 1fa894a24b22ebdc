/* Nodes, edges and texts of the suffix forest, and the insertion and removal of one suffix. See suffix_forest.c. */
#pragma once

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

/* Inserts a suffix, or lengthens the one that ends after its first `counted` tokens (0: there is none yet). */
static void insert_suffix(Forest *f, uint32_t root, uint32_t text, uint32_t start, uint32_t length, uint32_t counted) {
    const int32_t *tokens = f->texts[text].tokens;
    uint32_t node = root, done = 0, end = NONE;
    if (!counted) f->nodes[root].count++;
    while (done < length) {
        if (counted && done == counted) end = node;
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
            break;
        }
        Node *c = &f->nodes[child];
        const int32_t *edge = f->texts[c->text].tokens + c->position, *own = tokens + start + done;
        uint32_t most = c->length < length - done ? c->length : length - done, same = 1;
        while (same < most && edge[same] == own[same]) same++;
        if (same < c->length) child = split(f, child, same);
        if (done >= counted) f->nodes[child].count++;
        refer(f, &f->nodes[child], text, start + done);
        if (done >= counted) consider_best(f->nodes, node, child);
        node = child;
        done += same;
    }
    if (end != NONE) join(f, end, root); /* nothing ends there any more, maybe */
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
